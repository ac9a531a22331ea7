#!/usr/bin/env bash
# Builds the engine with the address and undefined-behaviour sanitizers, and runs the tests on it.
# Usage: tests/sanitize.sh [pytest arguments]. Needs GCC with its sanitizer libraries, and the extra convpar[test].
set -euo pipefail
cd "$(dirname "$0")/.."

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$root" 2>/dev/null || true
# Unoptimised: the sanitizers' checks in every instantiation take the optimiser tens of minutes.
meson setup "$root/build" "$root" -Db_sanitize=address,undefined -Db_lundef=false -Dbuildtype=debug -Dladder=unoptimised
meson compile -C "$root/build"
cp "$root"/build/convpar/backends/cpu/engine*.so "$root/convpar/backends/cpu/"

cd "$root"
# Python isn't built with the sanitizers, so their runtime comes first; its own allocations at exit are no leaks.
libraries="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)"
LD_PRELOAD="$libraries" \
ASAN_OPTIONS=detect_leaks=0 \
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  python -m pytest -p no:cacheprovider "$@"
