# Fails if any of OBJECTS uses AMX's tile registers but TILE_OBJECTS, or if the kernels among those that multiply bfloat16
# do not load, multiply and store tiles and give them back.
set(multiplying_kernels flash_attention flash_attention_backward fused_experts grouped_gemm symmetric_product)

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
  foreach(kernel IN LISTS multiplying_kernels)
    set(objects ${TILE_OBJECTS})
    list(FILTER objects INCLUDE REGEX "/${kernel}_kernel\\.cpp")
    if(NOT objects)
      message(FATAL_ERROR "There is no kernel ${kernel} at level amx")
    endif()
    tile_instructions(found ${objects})
    if(NOT found STREQUAL "ldtilecfg;tdpbf16ps;tileloadd;tilerelease;tilestored;tmm")
      message(FATAL_ERROR "${kernel} at level amx does not load, multiply, store and give back tiles: ${found}")
    endif()
  endforeach()
  list(REMOVE_ITEM OBJECTS ${TILE_OBJECTS})
endif()
tile_instructions(found ${OBJECTS})
if(found)
  message(FATAL_ERROR "Kernels below level amx use its tiles: ${found}")
endif()
