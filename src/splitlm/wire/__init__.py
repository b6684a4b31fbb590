"""Bytes to frames and back: layout, decoder, handshake, turns and buffers. No sockets, no torch."""
