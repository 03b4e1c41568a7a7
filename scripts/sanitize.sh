#!/usr/bin/env bash
# Runs the C++ kernels from several threads at once under ThreadSanitizer, then under AddressSanitizer and UBSan.
# Builds in a temporary folder. Skips a sanitizer whose runtime the compiler lacks. Returns 1 if one finds something.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

main() {
    command -v cmake > /dev/null || { echo "sanitize: skipped: there is no cmake"; exit 0; }
    check thread thread
    check address address,undefined
}

check() {
    local kind=$1 flags=$2
    if ! runs "$flags"; then
        echo "sanitize $kind: skipped: ${CXX:-c++} has no runtime for -fsanitize=$flags"
        return
    fi
    cmake -S . -B "$work/$kind" -DTHINWIRE_SANITIZE="$kind" > "$work/log" || { cat "$work/log"; exit 1; }
    cmake --build "$work/$kind" --parallel 2 > "$work/log" || { cat "$work/log"; exit 1; }
    echo "sanitize $kind: $(TSAN_OPTIONS=halt_on_error=1 "$work/$kind/native/sanitize/sanitize")"
}

# Whether a program with these sanitizers compiles, links and runs.
runs() {
    echo 'int main() { return 0; }' > "$work/probe.cpp"
    "${CXX:-c++}" -fsanitize="$1" "$work/probe.cpp" -o "$work/probe" > /dev/null 2>&1 && "$work/probe" > /dev/null 2>&1
}

main
