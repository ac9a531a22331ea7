#!/usr/bin/env bash
# Builds the engine with the address and undefined-behaviour sanitizers and runs the tests on it, then the checks of
# the CPU rungs, and the tests of pictures, once more at each lower instruction set: about ten minutes on two cores.
# Usage: tests/sanitize.sh [pytest arguments: only what they choose]. Needs GCC with its sanitizer libraries, and the
# extra convpar[test]. CONVPAR_EXAMPLES says how many problems a check draws (30).
set -euo pipefail
cd "$(dirname "$0")/.."

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir "$root/tree"
# A file that git knows may be gone from the working tree.
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$root/tree" 2>/dev/null || true

# The kernels ask for more, but the sanitizers' checks in every instantiation take a higher level tens of minutes.
cat >"$root/c++" <<'EOF'
#!/usr/bin/env bash
exec g++ "${@/#-O[23]/-O1}"
EOF
chmod +x "$root/c++"
CXX="$root/c++" meson setup "$root/build" "$root/tree" -Db_sanitize=address,undefined -Db_lundef=false -Dbuildtype=debug
meson compile -C "$root/build"
cp "$root"/build/convpar/backends/cpu/engine*.so "$root/tree/convpar/backends/cpu/"
cp "$root"/build/keys*.so "$root/tree/convpar/"

cd "$root/tree"
# Python isn't built with the sanitizers, so their runtime comes first; its own allocations at exit are no leaks.
sanitized=(
  # A shell ignores Ctrl-C in what it starts in the background, and tests send it.
  env --default-signal=INT
  "LD_PRELOAD=$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)"
  ASAN_OPTIONS=detect_leaks=0
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
  "CONVPAR_EXAMPLES=${CONVPAR_EXAMPLES:-30}"
  python
)
if [ $# -gt 0 ]; then
  arguments=("$@")
else
  arguments=(
    -n 2
    # They compile code of their own, for a GPU or its emulator; the engine has no part in it.
    --ignore=tests/gpu --ignore=tests/test_benchmarks_gpu.py
    # They build engines of their own, without sanitizers.
    --ignore=tests/test_builds.py
    # It looks for products in the listing of one function, among others; -O1 leaves them in functions that it calls.
    --deselect=tests/test_cli.py::test_assembly_of_each_rung_and_level
    # It limits the address space to 4 GB, and the sanitizer reserves terabytes of it.
    --deselect=tests/test_api.py::test_numbers_too_large_are_errors_or_work
  )
fi
status=0
"${sanitized[@]}" -m pytest -p no:cacheprovider "${arguments[@]}" || status=$?
[ $# -eq 0 ] || exit "$status"

# The tests ran at the highest level that this processor has.
lower="from convpar.backends.cpu.compiled import engine, isa; levels = engine().isa_levels(); print(*levels[levels.index(isa()) + 1 :])"
levels=$("${sanitized[@]}" -c "$lower")
for level in $levels; do
  echo "+ the CPU rungs at $level"
  CONVPAR_ISA=$level "${sanitized[@]}" -m convpar verify 'cpu-*' --jobs 2 --examples "${CONVPAR_EXAMPLES:-30}" || status=$?
  CONVPAR_ISA=$level "${sanitized[@]}" -m pytest -p no:cacheprovider tests/test_pictures.py || status=$?
  CONVPAR_ISA=$level "${sanitized[@]}" -m pytest -p no:cacheprovider tests/test_cpu_rungs.py -k "mask or planes or apart or laid_out or any_rows" || status=$?
done
exit "$status"
