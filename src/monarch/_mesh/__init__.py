"""Geometry of meshes: pure, no I/O."""
