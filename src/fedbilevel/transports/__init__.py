"""Transports: how tasks reach clients.

`virtual_clock` simulates clients in this process, on a virtual clock with delays and faults. The
transport to real clients over Flower is in `deploy/flower`.
"""
