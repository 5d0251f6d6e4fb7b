"""Channels, which move frames between agents. Each channel implements the contract in `nbdist.channel.contract`."""
