"""The machine below a run: mesh, processes, compilation, shapes, memory, disk, terminal."""
