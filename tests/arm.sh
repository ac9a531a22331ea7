#!/usr/bin/env bash
# Compiles the engine for 64-bit Arm and runs the checks of the CPU rungs and the tests of the engine on it, instruction
# by instruction in QEMU, as the least of these processors (ARMv8.0): about half an hour. Speed isn't looked at.
# Usage: tests/arm.sh [pytest arguments: only what they choose]. CONVPAR_EXAMPLES says how many problems a check draws
# (30), CONVPAR_ARM_COMPILER is gcc or clang; Clang builds without OpenMP.
# Needs Debian or a derivative whose package sources have arm64, as Debian's do, with the packages named below, which it
# installs when run by root; and PyPI, and the extra convpar[test]. No emulator needs to be registered with the kernel.
set -euo pipefail
cd "$(dirname "$0")/.."

compiler=${CONVPAR_ARM_COMPILER:-gcc}
packages=(g++-aarch64-linux-gnu qemu-user)
case $compiler in
  gcc) cc=aarch64-linux-gnu-gcc cxx=aarch64-linux-gnu-g++ target='' openmp=enabled ;;
  # Its OpenMP library would have to be that of its own version, for arm64.
  clang) cc=clang cxx=clang++ target="'--target=aarch64-linux-gnu', " openmp=disabled packages+=(clang) ;;
  *) echo "CONVPAR_ARM_COMPILER must be gcc or clang, not $compiler" >&2; exit 2 ;;
esac
missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "missing: apt-get install ${missing[*]}" >&2
    exit 2
  fi
  apt-get update
  apt-get install --yes --no-install-recommends "${missing[@]}"
fi
for program in meson ninja cython pip; do
  command -v "$program" >/dev/null || { echo "missing: $program (pip install 'convpar[test]')" >&2; exit 2; }
done

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

echo "+ Python for arm64, from packages that are unpacked and not installed"
mkdir -p "$root"/apt/{state/lists,cache/archives}/partial "$root/arm64"
cat >"$root/apt/apt.conf" <<EOF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
Dir::State "$root/apt/state";
Dir::State::status "/dev/null";
Dir::Cache "$root/apt/cache";
EOF
export APT_CONFIG="$root/apt/apt.conf"
apt-get --quiet update
apt-get --quiet install --yes --no-install-recommends --download-only python3 libpython3-dev libgomp1 libstdc++6
for package in "$root"/apt/cache/archives/*.deb; do dpkg-deb --extract "$package" "$root/arm64"; done
unset APT_CONFIG
name=$(readlink "$root/arm64/usr/bin/python3")

# A script stands for the program wherever it starts itself.
cat >"$root/python" <<EOF
#!/bin/sh
export PYTHONHOME="$root/arm64/usr" PYTHONPATH="\${PYTHONPATH:+\$PYTHONPATH:}$root/packages"
exec qemu-aarch64 -cpu cortex-a53 -L "$root/arm64" -0 "$root/python" "$root/arm64/usr/bin/$name" "\$@"
EOF
chmod +x "$root/python"
# The tests read the module's symbols.
mkdir "$root/bin"
for tool in nm objdump; do ln -s "$(command -v "aarch64-linux-gnu-$tool")" "$root/bin/$tool"; done

echo "+ its packages"
python3 - pyproject.toml >"$root/requirements.txt" <<'EOF'
import sys, tomllib

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = [r for e in ("cli", "fft", "test") for r in project["optional-dependencies"][e]]
print(*(r for r in project["dependencies"] + extras if not r.startswith("convpar[")), sep="\n")
EOF
pip install --quiet --disable-pip-version-check --target "$root/packages" --only-binary=:all: --implementation cp \
  --python-version "${name#python}" --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
  --requirement "$root/requirements.txt"

mkdir "$root/tree"
# A file that git knows may be gone from the working tree.
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$root/tree" 2>/dev/null || true
cat >"$root/cross.ini" <<EOF
[binaries]
c = '$cc'
cpp = '$cxx'
ar = 'aarch64-linux-gnu-ar'
strip = 'aarch64-linux-gnu-strip'
cython = '$(command -v cython)'
python = '$root/python'
[built-in options]
c_args = [$target'-idirafter', '$root/arm64/usr/include']
cpp_args = [$target'-idirafter', '$root/arm64/usr/include']
c_link_args = [${target%, }]
cpp_link_args = [${target%, }]
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'cortex-a53'
endian = 'little'
EOF
meson setup --cross-file "$root/cross.ini" "$root/build" "$root/tree" -Dopenmp=$openmp
meson compile -C "$root/build"
cp "$root"/build/convpar/backends/cpu/engine*.so "$root/tree/convpar/backends/cpu/"
cp "$root"/build/keys*.so "$root/tree/convpar/"

cd "$root/tree"
emulated=(
  # A shell ignores Ctrl-C in what it starts in the background, and tests send it.
  env --default-signal=INT
  "PATH=$root/bin:$PATH"
  OPENBLAS_NUM_THREADS=1
  "CONVPAR_EXAMPLES=${CONVPAR_EXAMPLES:-30}"
  "$root/python"
)
if [ $# -gt 0 ]; then
  "${emulated[@]}" -m pytest -p no:cacheprovider -o timeout=3600 "$@"
  exit
fi
"${emulated[@]}" -m convpar info
"${emulated[@]}" - <<'EOF'
import platform

from convpar.backends.cpu import compiled

engine = compiled.engine()
assert platform.machine() == "aarch64"
assert engine.isa_levels() == ("baseline",), engine.isa_levels()
EOF
status=0
"${emulated[@]}" -m convpar verify 'cpu-*' --require cpu-simd --jobs 1 --examples "${CONVPAR_EXAMPLES:-30}" || status=$?
# The emulator (QEMU 7.2) fails an assertion of its own, "cpu == current_cpu", in the child of a process where threads other than the one
# that forks are at work or keep OpenMP's.
forks=()
for case in "from another thread than the one that ran" "while another thread runs" \
  "while another thread makes its first call"; do
  forks+=(--deselect "tests/test_threads.py::test_a_fork_returns[$case]")
done
"${emulated[@]}" -m pytest -p no:cacheprovider -o timeout=3600 "${forks[@]}" tests/test_cpu_rungs.py tests/test_fft.py \
  tests/test_house.py tests/test_threads.py || status=$?
exit "$status"
