"""Disturbances that users, strangers and broken members can cause.

=================  ==============================================================
`interrupts`       Ctrl-C at any moment of what a test does
`hostile_objects`  objects whose every method fails, and notes that it was called
`stranger_crowd`   a program: strangers of eight kinds at the ports of a cluster
`mad_member`       a member that sends mutated frames
`forged_client`    a program: forged messages by a client's invitation to a swarm
=================  ==============================================================
"""
