"""A notebook as its user has it: a kernel, a server, a page.

================  =====================================================
`older_packages`  installs older packages than those here, for a kernel
`frontend`        drives a kernel as a front end does
`servers`         starts Jupyter servers as people have them
`browser`         opens a notebook in a real browser
================  =====================================================
"""
