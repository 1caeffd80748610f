"""Recurrent layers (gated delta rule, Mamba2, short convolution): one mixer a file, and the state slots behind them."""
