"""What workers check about each other: the handshake, headers, finite numbers, equal weights."""
