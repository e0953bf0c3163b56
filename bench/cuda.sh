#!/usr/bin/env bash
# Everything that a machine with an NVIDIA GPU can tell of the CUDA path, in one call of at most ten minutes and without
# a network: the kernels' test vectors, whole tiny models against the CPU, races and memory under compute-sanitizer, what
# fraction of the roofline each kernel reaches, and timings.
#
#     PYTHON=python3 bench/cuda.sh [FOLDER]            results go to FOLDER (build/cuda_bench)
#     PYTHON=python3 bench/cuda.sh --dry-run [FOLDER]  the same on the host device, to try this script
#     PYTHON=python3 bench/cuda.sh --pack [FOLDER]     on a machine with a network: what the others need, in build/cuda_kit
#
# Needs a C++ compiler and a Python with edgeh2o's dependencies, pytest and gguf; what of these it lacks, and the images of
# the kernels, are taken from build/cuda_kit if that was packed (KIT names another folder), for PYTHON_VERSION (3.12) there.
# edgeh2o is built in place, for this processor alone, unless PYTHON can import it. MODEL=FILE.gguf times that model too,
# and LLAMA_BENCH=PROGRAM llama.cpp's llama-bench on it; TESTS='-k q8' runs some of the tests, '-n 8' eight at a time;
# LIMIT=SECONDS gives all of it less than ten minutes (600).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
kit=$(realpath -m "${KIT:-build/cuda_kit}")
mode=run
case ${1:-} in --dry-run | --pack) mode=${1#--}; shift ;; esac

# What is not in the repository: wheels for the other machine's Python, PTX for limits, images, compute-sanitizer.
pack() {
  local version=${PYTHON_VERSION:-3.12} platform platforms=()
  for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${platform}_${ARCHITECTURE:-x86_64}")
  done
  mkdir -p "$kit"/wheels
  $python -m tools.build_cuda_images --fetch && cp -r edgeh2o/cuda/images "$kit" || return 1
  $python -m bench.cuda_roofline --write-peaks "$kit"/peaks.ptx || return 1
  # Without what these depend on but those of edgeh2o: NumPy and the like are there, or named in WHEELS.
  $python -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
    "${platforms[@]}" -d "$kit"/wheels gguf rich pygments markdown-it-py mdurl pybind11 cython pytest pluggy iniconfig ${WHEELS:-} \
    || return 1
  $python -m pip download -q --no-deps --only-binary=:all: "${platforms[@]}" --platform "manylinux_2_25_${ARCHITECTURE:-x86_64}" \
    -d "$kit"/sanitizer nvidia-cuda-sanitizer-api || echo "without compute-sanitizer"
  du -sh "$kit"
}
if [ "$mode" = pack ]; then
  pack
  exit
fi

out=${1:-build/cuda_bench}
mkdir -p "$out"
out=$(realpath "$out")
started=$SECONDS
limit=${LIMIT:-600}
export PYTHONPATH=${PYTHONPATH:-$PWD} PYTHONUNBUFFERED=1
failed=0

# step NAME SECONDS COMMAND...: runs it within its time; its output goes to the terminal and to FOLDER/NAME.txt. With a GPU
# all steps have LIMIT seconds together; on the host device, which is slower, and on few cores, each has more.
step() {
  local name=$1 seconds=$2 left=$((limit - 5 - SECONDS + started))
  shift 2
  if [ "$mode" = dry-run ]; then
    seconds=$((3 * seconds))
  elif [ "$left" -lt "$seconds" ]; then
    seconds=$((left > 1 ? left : 1))
  fi
  printf '\n== %s (%ss, at most %ss)\n' "$name" "$((SECONDS - started))" "$seconds"
  timeout "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
  local status=${PIPESTATUS[0]}
  if [ "$status" != 0 ]; then echo "$name: failed ($status)"; failed=1; fi
}

# What this Python lacks of the packed wheels goes beside it, never over what it has.
for wheel in "$kit"/wheels/*.whl; do
  [ -e "$wheel" ] || continue
  name=$(basename "$wheel" | cut -d- -f1)
  $python -m pip show -q "$name" > /dev/null 2>&1 && continue
  $python -m pip install -q --no-index --no-deps --target "$out"/site "$wheel" && echo "from the kit: $name"
done
[ -d "$out"/site ] && export PYTHONPATH=$PYTHONPATH:$out/site
if ! $python -c 'import edgeh2o._core' > /dev/null 2>&1; then
  isas=$(grep -qw avx512_vnni /proc/cpuinfo && echo avx512vnni || true)
  step build 240 env EDGEH2O_ISAS="$isas" $python setup.py -q build_clib build_ext --inplace
fi
if [ -d "$kit"/images ] && [ -z "${EDGEH2O_CUDA_IMAGES:-}" ]; then export EDGEH2O_CUDA_IMAGES=$kit/images; fi

library=libcuda.so.1
if [ "$mode" = dry-run ]; then
  library=$($python -c 'from tests.cuda.host_library import build_driver; print(build_driver())') || exit 1
  images=$out/images
  mkdir -p "$images"
  $python -c 'import sys, zlib; open(sys.argv[1], "wb").write(zlib.compress(b"\x7fELF"))' "$images/kernels_sm_87.z"
  echo '{"images": {"sm_87": "nobody"}}' > "$images/images.json"
  export EDGEH2O_LIBCUDA=$library EDGEH2O_CUDA_IMAGES=$images EDGEH2O_TEST_CUDA_DRIVER=$library
  small=--small
else
  export EDGEH2O_TEST_CUDA_DRIVER=$library EDGEH2O_TEST_CUDA_IMAGES=1
  small=
fi

step doctor 60 $python -m edgeh2o doctor
step kernels 90 $python -m pytest -q -p no:cacheprovider -p no:benchmark tests/cuda/kernels ${TESTS:-}
step models 120 $python -m pytest -q -p no:cacheprovider -p no:benchmark tests/cuda/models ${TESTS:-}
peaks=
if [ -e "$kit"/peaks.ptx ]; then peaks="--peaks $kit/peaks.ptx"; fi
step roofline 90 $python -m bench.cuda_roofline --library "$library" $small $peaks
tiny=$out/tiny.gguf
$python -m tools.make_tiny_model "$tiny" --tensor-type Q4_0 || failed=1
for model in "$tiny" ${MODEL:-}; do
  sizes="-p 512,4096 -n 64 --budget 1024"
  if [ "$mode" = dry-run ]; then sizes="-p 48 -n 2 -b 32 -ub 16 --budget 8"; fi
  step "bench_$(basename "$model" .gguf)" 90 $python -m edgeh2o bench "$model" $sizes -r 1 --device cuda
done
if [ "$mode" = run ] && [ -n "${LLAMA_BENCH:-}" ] && [ -n "${MODEL:-}" ]; then
  step llama_bench 60 "$LLAMA_BENCH" -m "$MODEL" -p 512,4096 -n 64 -r 1 -ngl 99
fi
# Last, with what is left of ten minutes: it takes the longest and says nothing of speed.
sanitizer=$(command -v compute-sanitizer || find /usr/local/cuda*/bin -name compute-sanitizer 2> /dev/null | head -1)
if [ -z "$sanitizer" ] && [ -d "$kit"/sanitizer ]; then
  $python -m pip install -q --no-index --no-deps --target "$out"/sanitizer "$kit"/sanitizer/*.whl
  sanitizer=$(find "$out"/sanitizer -type f -name compute-sanitizer | head -1)
  chmod -R u+x "$out"/sanitizer
fi
if [ "$mode" = run ] && [ -n "$sanitizer" ]; then
  for check in memcheck racecheck synccheck; do
    left=$((limit - 20 - SECONDS + started))
    if [ "$left" -lt 30 ]; then echo "$check: not run, no time is left"; continue; fi
    step "$check" "$((left < 60 ? left : 60))" "$sanitizer" --tool "$check" --error-exitcode 9 \
      $python -m pytest -q -x -p no:cacheprovider -p no:benchmark tests/cuda/kernels ${TESTS:-}
  done
else
  echo "compute-sanitizer: not run"
fi
echo
if [ "$mode" = dry-run ]; then echo "dry run: no time above is that of a GPU"; fi
[ "$failed" = 0 ] && echo "all passed" || echo "FAILED: see above"
exit $failed
