"""What a checkpoint's weights are before and after loading: packed and quantized formats, `--quantize int8`, merged adapters."""
