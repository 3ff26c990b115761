"""Base models of a service: their descriptions and facts, and how they are fetched."""
