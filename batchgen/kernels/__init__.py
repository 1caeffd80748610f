"""Kernels for the CPU, in C++: compiled on this machine for its processor, once, and kept. Without a compiler plain torch runs.

`build` compiles and loads the library and finds its functions; `ops`, `int8` and `recurrent` call them, and `attention/cpu_backend.py`.
"""
