"""The verifiers that ship. They come in through the door that plugins use: entry points of this distribution."""
