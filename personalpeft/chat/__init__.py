"""Turn a chat request into a reply: prompt, adapter routing, stream and comparison."""
