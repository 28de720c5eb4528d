# Fails if any of OBJECTS uses AMX's tile registers but TILE_OBJECTS, or if those do not load, multiply and store tiles and
# give them back.
function(tile_instructions variable)
  execute_process(COMMAND "${OBJDUMP}" --disassemble --no-show-raw-insn ${ARGN}
                  COMMAND grep -oE "ldtilecfg|tileloadd|tdpbf16ps|tilestored|tilerelease|tmm" COMMAND sort -u
                  OUTPUT_VARIABLE found RESULTS_VARIABLE status)
  if(NOT status MATCHES "^0;[01];0$")  # grep's 1: there are none
    message(FATAL_ERROR "${OBJDUMP} failed: ${status}")
  endif()
  string(REGEX MATCHALL "[^\n]+" found "${found}")
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

if(TILE_OBJECTS)
  tile_instructions(found ${TILE_OBJECTS})
  if(NOT found STREQUAL "ldtilecfg;tdpbf16ps;tileloadd;tilerelease;tilestored;tmm")
    message(FATAL_ERROR "Level amx does not load, multiply, store and give back tiles: ${found}")
  endif()
  list(REMOVE_ITEM OBJECTS ${TILE_OBJECTS})
endif()
tile_instructions(found ${OBJECTS})
if(found)
  message(FATAL_ERROR "Kernels below level amx use its tiles: ${found}")
endif()
