"""Talks to the workers' kernels: connections, messages, and the cells that run there.

======================  ========================================
`connection`            one thread that speaks to all kernels
`jupyter_wire`          encodes and decodes their messages
`cells`                 a cell that runs on workers
`routing`               messages to the cells that caused them
`comms`                 messages of widgets
`output_widgets`        messages of widgets that capture output
`asking`                completion and help
`notices`               texts about workers that failed
`labels`, `page_lines`  names and lines in tracebacks of cells
`relay`                 messages of a kernel on another host
`waiting_output`        those that wait for the notebook
`versions`              the differences between Jupyter versions
======================  ================================="""
