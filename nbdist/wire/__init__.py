"""The layer of bytes: messages, the encoding of values as frames, and the protocol with one peer. All of it is pure."""
