"""The model proxy: what a harness believes is its model provider.

Here: the wire formats of harnesses, sessions and their limits, rendering to tokens, the engine pools, the journal. Not here:
sandboxes, rewards, training; they reach the proxy over its session API only. docs/proxy.md explains the design.
"""
