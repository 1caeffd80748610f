"""Kernels for the CPU, in C++: compiled on this machine for its processor, once, and kept. Without a compiler plain torch runs.

`build` compiles and loads the library and finds its functions; `elementwise` and `linear` call them, and `attention/packed.py`.
"""
