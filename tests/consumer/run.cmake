# cmake -DMODE=add_subdirectory|installed -DSOURCE=... -DBINARY=... -DWORK=... -DPYTHON=... -DMAKE=... -P run.cmake
# Configures, builds and runs the consumer in WORK.
file(REMOVE_RECURSE ${WORK})
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed with ${result}: ${ARGN}")
  endif()
endfunction()

set(configure ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK}/build -G Ninja -DCMAKE_MAKE_PROGRAM=${MAKE}
              -DCMAKE_BUILD_TYPE=Release)
if(MODE STREQUAL "add_subdirectory")
  # A second build of the library: quick with a warm compiler cache.
  list(APPEND configure -DCONSUMER_ADD_SUBDIRECTORY=${SOURCE} -DPython3_EXECUTABLE=${PYTHON})
else()
  step(${CMAKE_COMMAND} --install ${BINARY} --prefix ${WORK}/prefix)
  list(APPEND configure -DCMAKE_PREFIX_PATH=${WORK}/prefix)
endif()
step(${configure})
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/consumer)
