#!/usr/bin/env bash
# Runs the C++ kernels from several threads at once under ThreadSanitizer, then under AddressSanitizer and UBSan, and
# there gives 10,000 damaged payloads to the decoders. Does the same to the engine of native/wire: two of them talk while
# their connections are cut, and one gets 5,000 damaged conversations. Builds in a temporary folder. Skips a sanitizer whose runtime the
# compiler lacks. Returns 1 if one finds something.
# `scripts/sanitize.sh fuzz INPUTS [SEED]` instead gives more damaged payloads to the decoders, and a tenth as many
# conversations to the engine.
# `scripts/sanitize.sh binding` instead calls the kernels from Python threads, with the binding under ThreadSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

main() {
    command -v cmake > /dev/null || { echo "sanitize: skipped: there is no cmake"; exit 0; }
    if [ "${1:-}" = binding ]; then check_binding; return; fi
    if [ "${1:-}" = fuzz ]; then
        build address address,undefined && run address fuzz "${@:2}" && run address wire fuzz $(("$2" / 10)) "${@:3}"
        return
    fi
    make_keys
    if build thread thread; then run thread sanitize && run thread wire loopback "${keys[@]}"; fi
    if build address address,undefined; then
        run address sanitize && run address fuzz 10000
        run address wire loopback "${keys[@]}" && run address wire fuzz 5000
    fi
}

# Makes a certificate for encrypted connections, where there is OpenSSL's program.
keys=()
make_keys() {
    if openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=worker -days 1 \
        -keyout "$work/key.pem" -out "$work/certificate.pem" > /dev/null 2>&1; then
        keys=("$work/certificate.pem" "$work/key.pem")
    else
        echo "sanitize: connections are not encrypted: there is no openssl program"
    fi
}

# Builds the programs under a sanitizer; returns 1 if there is no runtime for it.
build() {
    local kind=$1 flags=$2
    if ! runs "$flags"; then
        echo "sanitize $kind: skipped: ${CXX:-c++} has no runtime for -fsanitize=$flags"
        return 1
    fi
    cmake -S . -B "$work/$kind" -DTHINWIRE_SANITIZE="$kind" > "$work/log" || { cat "$work/log"; exit 1; }
    cmake --build "$work/$kind" --parallel 2 > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}

# Runs one of the programs; exits with 1 if it fails.
run() {
    local kind=$1 program=$2 said
    said=$(TSAN_OPTIONS=halt_on_error=1 "$work/$kind/native/sanitize/$program" "${@:3}") || exit 1
    echo "sanitize $kind: $said"
}

# Python itself is not built for ThreadSanitizer, but its locks are seen. PyTorch's libraries are left out.
check_binding() {
    local python packages
    python=$(readlink -f .venv/bin/python)
    packages=$(.venv/bin/python -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    cmake -S . -B "$work/binding" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS=-fsanitize=thread \
        -DPython_EXECUTABLE="$PWD/.venv/bin/python" -Dnanobind_DIR="$(.venv/bin/python -m nanobind --cmake_dir)" \
        > "$work/log" || { cat "$work/log"; exit 1; }
    cmake --build "$work/binding" --target _native --parallel 2 > "$work/log" || { cat "$work/log"; exit 1; }
    cp -r src/thinwire "$work/thinwire"
    rm -f "$work"/thinwire/kernels/_native*.so
    cp "$work"/binding/_native*.so "$work/thinwire/kernels/"
    printf '%s\n' called_from_lib:libtorch_cpu.so called_from_lib:libtorch_python.so called_from_lib:libc10.so \
        > "$work/suppressions"
    LD_PRELOAD=$("${CXX:-c++}" -print-file-name=libtsan.so) OMP_NUM_THREADS=1 \
        TSAN_OPTIONS="suppressions=$work/suppressions report_mutex_bugs=0" \
        PYTHONPATH="$work:$PWD/tests:$packages" "$python" tests/kernels/test_kernels_threads.py
    echo "sanitize binding: no data race"
}

# Whether a program with these sanitizers compiles, links and runs.
runs() {
    echo 'int main() { return 0; }' > "$work/probe.cpp"
    "${CXX:-c++}" -fsanitize="$1" "$work/probe.cpp" -o "$work/probe" > /dev/null 2>&1 && "$work/probe" > /dev/null 2>&1
}

main "$@"
