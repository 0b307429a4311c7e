# Ranks as processes over shared memory, and what may happen to them.
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_EXECUTABLE)
  add_executable(shm_ranks shm_ranks.cpp)
  target_link_libraries(shm_ranks PRIVATE fsdp::fsdp fsdp_options)
  foreach(_case killed_peer stopped_peer two_jobs eight_ranks forked_child another_container)
    add_test(NAME shm.${_case}
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/shm_faults.py $<TARGET_FILE:shm_ranks> ${_case})
    set_tests_properties(shm.${_case} PROPERTIES LABELS processes TIMEOUT 300 SKIP_RETURN_CODE 77)
  endforeach()
endif()
