"""Jupyter's messages, kernels and front ends, as this package uses and knows them.

===================  ================================================================
`jupyter_wire`       encodes and decodes Jupyter's messages
`kernel_connection`  sends to the workers' kernels and reads from them, in one thread
`versions`           the differences between Jupyter versions
`labels`             names for the frames of cells: ``In[3] on worker1``
`page_lines`         lines of code as the page's editor counts them
`waiting_output`     output of another host that waits for the notebook
`relay`              messages of a kernel on another host
===================  ================================================================
"""
