"""Models that the notebooks and programs share, written out: nothing to download, nothing else to install."""
