"""What workers run for the tests. It is here because workers must be able to import it.

====================  =============================================================================
`swarm_models`        tiny language models of several families, and what they write
`pipeline_models`     layers and losses for pipelines, and what is left of a pipeline on a worker
`autograd_functions`  functions of backward passes over several workers
`autograd_programs`   random programs whose gradients must be equal in one process and over workers
====================  =============================================================================
"""
