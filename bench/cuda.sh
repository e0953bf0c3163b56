#!/usr/bin/env bash
# Everything that a machine with an NVIDIA GPU can tell of the CUDA path, in one call of at most ten minutes and without
# a network: the kernels' test vectors, whole tiny models against the CPU, races and memory under compute-sanitizer
# where it is there, and timings.
#
#     PYTHON=python3 bench/cuda.sh [FOLDER]            results go to FOLDER (build/cuda_bench)
#     PYTHON=python3 bench/cuda.sh --dry-run [FOLDER]  the same on the host device, to try this script
#
# The Python needs edgeh2o built in place or installed, with images (python -m tools.build_cuda_images --fetch), and what
# its tests need: numpy, pytest, gguf. MODEL=FILE.gguf times that model too, and LLAMA_BENCH=PROGRAM llama.cpp's
# llama-bench on it; TESTS='-k q8' runs some of the tests.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
dry=no
if [ "${1:-}" = --dry-run ]; then dry=yes; shift; fi
out=${1:-build/cuda_bench}
mkdir -p "$out"
export PYTHONPATH=${PYTHONPATH:-$PWD} PYTHONUNBUFFERED=1
failed=0

# step NAME SECONDS COMMAND...: runs it within its time; its output goes to the terminal and to FOLDER/NAME.txt.
step() {
  local name=$1 seconds=$2
  shift 2
  printf '\n== %s\n' "$name"
  timeout "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
  local status=${PIPESTATUS[0]}
  if [ "$status" != 0 ]; then echo "$name: failed ($status)"; failed=1; fi
}

if [ "$dry" = yes ]; then
  driver=$($python -c 'from tests.cuda.host_library import build_driver; print(build_driver())') || exit 1
  images=$out/images
  mkdir -p "$images"
  $python -c 'import sys, zlib; open(sys.argv[1], "wb").write(zlib.compress(b"\x7fELF"))' "$images/kernels_sm_87.z"
  echo '{"images": {"sm_87": "nobody"}}' > "$images/images.json"
  export EDGEH2O_LIBCUDA=$driver EDGEH2O_CUDA_IMAGES=$images EDGEH2O_TEST_CUDA_DRIVER=$driver
else
  export EDGEH2O_TEST_CUDA_DRIVER=libcuda.so.1 EDGEH2O_TEST_CUDA_IMAGES=1
fi

step doctor 60 $python -m edgeh2o doctor
step kernels 120 $python -m pytest -q -p no:cacheprovider tests/cuda/test_kernels.py ${TESTS:-}
step models 180 $python -m pytest -q -p no:cacheprovider tests/cuda/test_decoder.py ${TESTS:-}
sanitizer=$(command -v compute-sanitizer || ls build/nvrtc/*/nvidia/cu*/bin/compute-sanitizer 2> /dev/null | head -1)
if [ "$dry" = no ] && [ -n "$sanitizer" ]; then
  for check in memcheck racecheck synccheck; do
    step "$check" 60 "$sanitizer" --tool "$check" --error-exitcode 9 \
      $python -m pytest -q -x -p no:cacheprovider tests/cuda/test_kernels.py ${TESTS:-}
  done
else
  echo "compute-sanitizer: not run"
fi
tiny=$out/tiny.gguf
$python -m tools.make_tiny_model "$tiny" --tensor-type Q4_0 || failed=1
for model in "$tiny" ${MODEL:-}; do
  sizes="-p 512,4096 -n 64 --budget 1024"
  if [ "$dry" = yes ]; then sizes="-p 48 -n 2 -b 32 -ub 16 --budget 8"; fi
  step "bench_$(basename "$model" .gguf)" 150 $python -m edgeh2o bench "$model" $sizes -r 1 --device cuda
done
if [ "$dry" = no ] && [ -n "${LLAMA_BENCH:-}" ] && [ -n "${MODEL:-}" ]; then
  step llama_bench 100 "$LLAMA_BENCH" -m "$MODEL" -p 512,4096 -n 64 -r 1 -ngl 99
fi
echo
if [ "$dry" = yes ]; then echo "dry run: no time above is that of a GPU"; fi
[ "$failed" = 0 ] && echo "all passed" || echo "FAILED: see above"
exit $failed
