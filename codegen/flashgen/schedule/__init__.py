"""From a Problem and a Device to steps: dispatch, grids, the order of tiles. Pure functions."""
