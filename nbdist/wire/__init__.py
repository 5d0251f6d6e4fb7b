"""Bytes: what messages look like, how values become frames, and the protocol of one peer. All pure."""
