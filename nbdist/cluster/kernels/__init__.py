"""Talks to the workers' kernels: connections, messages, and the cells that run there.

======================  =======================================
`connection`            one thread that speaks to all kernels
`jupyter_wire`          encodes and decodes their messages
`cells`                 a cell that runs on workers
`routing`               messages to the cells that caused them
`comms`                 messages of widgets
`output_widgets`        messages of widgets that capture output
`asking`                completion and help
`notices`               what a cell says of workers that failed
`labels`, `page_lines`  names and lines in tracebacks of cells
`versions`              what differs between versions of ipykernel
`relay`                 their way between two hosts
`back_pressure`         code that prints faster than that waits
======================  =======================================
"""
