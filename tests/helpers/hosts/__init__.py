"""Hosts of a cluster, made on this machine. Only root can make them.

===============  ==========================================================================
`other_hosts`    makes hosts from namespaces, cuts them off, slows them down
`keepers`        clusters whose workers join from such hosts, or from processes of this one
`relay_process`  the process that copies frames for a `relay`
`relay`          the line of a host, which delays, loses, holds and resets on demand
===============  ==========================================================================
"""
