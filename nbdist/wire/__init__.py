"""The layer of bytes: the messages, how values become frames, and the protocol with one peer. All of it is pure."""
