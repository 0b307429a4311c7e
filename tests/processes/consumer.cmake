# The CMake package as other projects see it.
if(FSDP_INSTALL AND NOT FSDP_SANITIZE AND CMAKE_GENERATOR STREQUAL "Ninja")
  set(_modes installed)
  if(FSDP_CCACHE)  # add_subdirectory compiles the library once more: minutes without a warm compiler cache
    list(APPEND _modes add_subdirectory)
  endif()
  foreach(_mode ${_modes})
    add_test(NAME consumer.${_mode}
             COMMAND ${CMAKE_COMMAND} -DMODE=${_mode} -DSOURCE=${PROJECT_SOURCE_DIR} -DBINARY=${PROJECT_BINARY_DIR}
                     -DWORK=${CMAKE_CURRENT_BINARY_DIR}/consumer-${_mode} -DPYTHON=${Python3_EXECUTABLE}
                     -DMAKE=${CMAKE_MAKE_PROGRAM} -P ${PROJECT_SOURCE_DIR}/tests/consumer/run.cmake)
    set_tests_properties(consumer.${_mode} PROPERTIES LABELS processes TIMEOUT 1200 RUN_SERIAL ON)
  endforeach()
endif()
