# Fails if a kernel object file defines a weak symbol. The linker keeps one copy of a weak function for all files; if that
# is the one compiled for AVX-512, every other path runs it too, on machines that do not have the instructions.
execute_process(COMMAND "${NM}" --defined-only --demangle ${OBJECTS} OUTPUT_VARIABLE symbols RESULT_VARIABLE status)
if(status)
  message(FATAL_ERROR "${NM} failed")
endif()
string(REGEX MATCHALL "[^\n]* [VWuvw] [^\n]*" weak "${symbols}")
list(FILTER weak EXCLUDE REGEX "DW\\.ref\\.__gxx_personality_v0")  # a pointer for unwinding, the same for all
if(weak)
  list(JOIN weak "\n" weak)
  message(FATAL_ERROR "Kernels must keep their functions in an anonymous namespace, but define:\n${weak}")
endif()
