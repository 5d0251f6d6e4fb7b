"""Stand-ins that a test has in its hand, in place of what runs by itself, is slow or is not there.

=================  ===================================================================================
`late_gpu`         a GPU's clock, which lags behind until the test lets it go on
`handmade_traces`  recorded graphs that are made by hand, for drawing
`swarm_double`     a swarm as a map knows one; a kernel can run the file, too
`stepping`         agents in one thread that run step by step, and counts of what they call
`simulation`       agents in one thread, on a wire whose messages the test delivers, loses and doubles
=================  ===================================================================================
"""
