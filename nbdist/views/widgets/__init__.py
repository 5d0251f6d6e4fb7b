"""Views that live in a page: the only modules that know of widgets."""
