"""Who somebody is and how that is proven: keys, memberships, the handshake, records."""
