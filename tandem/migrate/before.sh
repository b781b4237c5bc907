# Every bash process of a user's script reads this file first. Before each command, it sets PATH to the folder of
# shims again. If a command starts a trainer with a Python that is given by its path, the shim runs instead.
exec {BASH_XTRACEFD}>/dev/null
set -o functrace

# Returns whether the command must be skipped. The trap negates the result with `!`, so that `set -e` ignores it.
tandem_skips() {
  shopt -s extdebug # set here, because at the start of a shell it would require a debugger
  PATH=$tandem_root/shims
  local rest=$1 first program
  while [[ $rest =~ ^[A-Za-z_][A-Za-z_0-9]*=[^[:space:]\"\'\$\(]*[[:space:]]+(.*) ]]; do
    rest=${BASH_REMATCH[1]}
  done
  [[ ! $rest =~ ^[A-Za-z_][A-Za-z_0-9]*(\[[^]]*\])?\+?= ]] || return 1
  first=${rest%%[[:space:]]*}
  [[ $first == *[\$/]* && $first != *['`(;&|<>']* ]] || return 1
  local -a words=()
  eval "words=( $first )" 2>/dev/null || return 1
  program=${words[0]-}
  [[ $program == */* && $program != "$tandem_root/"* ]] || return 1
  case ${program##*/}:$1 in
    python*:*verl.trainer.* | python*:*recipe.* | python*:*openrlhf.cli.*)
      eval "${1/"$first"/"'$tandem_root/shims/python3'"}"
      return 0
      ;;
  esac
  "$tandem_root/shims/.other" "$rest"
}

command_not_found_handle() {
  "$tandem_root/shims/.other" "$@"
}
trap '! tandem_skips "$BASH_COMMAND"' DEBUG
