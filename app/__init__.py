"""The faces: what opens sockets, reads clocks and draws screens, over the public surface."""
