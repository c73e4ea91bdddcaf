#!/usr/bin/env bash
# The benchmark on complete image sets, for a machine with internet access. The same command resumes a stopped run.
#
#     benchmarks/full_sets.sh FOLDER
#
# Downloads MNIST, FashionMNIST, KMNIST, notMNIST (both parts), CIFAR-10 and SVHN, checks them against published
# checksums, runs the benchmark and writes tables:
#
#     FOLDER/data            the image sets
#     FOLDER/grey            the paper's four sets, with notMNIST's part that was cleaned by hand (18,700 images)
#     FOLDER/grey_large      the same with the other part of notMNIST (529,000 images)
#     FOLDER/colour          CIFAR-10 and SVHN, each against the other
#     FOLDER/*/report        page and tables of each
#
# Settings from the environment: PRESET (paper or quick; default paper), METHODS and SEEDS (default: all of the preset),
# ONEFOLD (the command; default .venv/bin/onefold, else onefold).
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:?usage: benchmarks/full_sets.sh FOLDER}"
onefold="${ONEFOLD:-$root/.venv/bin/onefold}"
[ -x "$onefold" ] || onefold="$(command -v "${ONEFOLD:-onefold}")"

"$onefold" data fetch mnist fashion_mnist kmnist notmnist notmnist_large cifar10 svhn --data-dir "$folder/data"

failed=0
bench() {
  local name="$1"
  shift
  local options=(-o "$folder/$name" --preset "${PRESET:-paper}" --data-dir "$folder/data" --ids "$@")
  # shellcheck disable=SC2086  # METHODS and SEEDS are lists of words
  [ -z "${METHODS:-}" ] || options+=(--methods ${METHODS})
  # shellcheck disable=SC2086
  [ -z "${SEEDS:-}" ] || options+=(--seeds ${SEEDS})
  "$onefold" bench run "${options[@]}" || failed=1 # the report shows the units that did not fail
  "$onefold" report "$folder/$name"
}
bench grey fashion_mnist mnist kmnist notmnist
bench grey_large "fashion_mnist=$folder/data/fashion_mnist" "mnist=$folder/data/mnist" \
  "kmnist=$folder/data/kmnist" "notmnist_large=$folder/data/notmnist_large.npz"
bench colour cifar10 svhn
exit "$failed"
