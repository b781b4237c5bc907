# Replaces a program on PATH while a user's script runs. It records calls of verl's and OpenRLHF's trainers instead of
# running them. It only uses builtins of bash, so that it works even if the script changes PATH.
name=${0##*/}
shims=${0%/*}
root=${shims%/*}

is_trainer() {
  local word previous=
  for word; do
    case $previous:$word in
      -m:verl.trainer.* | -m:verl.experimental.* | -m:recipe.* | -m:openrlhf.cli.*) return 0 ;;
      -[a-zA-Z]m:verl.trainer.* | -[a-zA-Z]m:recipe.*) return 0 ;; # as in -um
    esac
    case $word in
      -mverl.trainer.* | verl/trainer/*.py | */verl/trainer/*.py | recipe/*/main_*.py | */recipe/*/main_*.py) return 0 ;;
    esac
    previous=$word
  done
  return 1
}

# Reserves the first free number in a folder. Calls that run at the same time get different numbers.
number_in() {
  number=1
  until (set -C && : >"$1/$number") 2>/dev/null; do
    number=$((number + 1))
    ((number < 10000)) || exit 1
  done
}

keep_call() {
  number_in "$root/calls"
  {
    printf '%s\0' "$PWD" "$#" "$@"
    local variable
    while read -r variable; do
      printf '%s=%s\0' "$variable" "${!variable}"
    done < <(compgen -e)
  } >"$root/calls/$number"
  : >"$root/calls/$number.whole"
}

keep_other() {
  number_in "$root/others"
  printf '%s ' "$@" >"$root/others/$number"
}

if [[ $name == .other ]]; then
  keep_other "$@"
elif is_trainer "$@"; then
  keep_call "$name" "$@"
else
  case $name in
    tee) exec cat ;;
    sh) exec bash "$@" ;;
    *) keep_other "$name" "$@" ;;
  esac
fi
