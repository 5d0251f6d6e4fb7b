"""Channels, which move frames between agents. Every channel keeps the contract in `nbdist.channel.contract`."""
