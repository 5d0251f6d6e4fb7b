"""Live views, which change in the page: the only modules that import ipywidgets and anywidget."""
