"""The launchers of workers on other hosts.

============  =============================================================================
`remote`      the common part of launchers whose workers run on other hosts
`inviting`    the common part of launchers that invite workers, also into a running cluster
`join`        workers that a person or a batch system starts, and that join
`open_local`  processes of this host, and workers that join them
`ray_room`    waits until Ray has room for the workers, and says why there is none
`ray_actor`   the code in the process that Ray starts for a worker
`ray`         workers that Ray places
============  =============================================================================
"""
