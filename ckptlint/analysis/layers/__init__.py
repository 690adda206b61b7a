"""Layers, experts and ranks against their siblings."""
