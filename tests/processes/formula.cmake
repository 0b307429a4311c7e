# train_gpt --formula against PyTorch's FSDP2, and train_gpt resumed against train_gpt in one go. Needs the Python whose torch is this LibTorch.
find_package(Python3 QUIET COMPONENTS Interpreter)
if(TARGET train_gpt AND Python3_EXECUTABLE)
  function(fsdp_add_formula_test name)
    add_test(NAME formula.${name}
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/formula.py $<TARGET_FILE:train_gpt>
                     ${PROJECT_SOURCE_DIR}/benchmarks/peers/gpt_fsdp2.py ${ARGN})
    set_tests_properties(formula.${name} PROPERTIES LABELS processes TIMEOUT 600 RUN_SERIAL ON)
  endfunction()
  fsdp_add_formula_test(dim64_1rank 1 64 none,ddp,zero1,zero2,zero3)
  fsdp_add_formula_test(dim64_2ranks 2 64 ddp,zero1,zero2,zero3)
  fsdp_add_formula_test(dim64_2ranks_clipped 2 64 ddp,zero1,zero2,zero3 --clip 1.0)
  fsdp_add_formula_test(dim64_4ranks 4 64 ddp,zero1,zero2,zero3)
  fsdp_add_formula_test(dim256_1rank 1 256 zero3)
  fsdp_add_formula_test(dim256_2ranks 2 256 zero3)
  fsdp_add_formula_test(dim256_4ranks 4 256 zero3)
  add_test(NAME train_gpt.resume
           COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/resume.py $<TARGET_FILE:train_gpt>)
  set_tests_properties(train_gpt.resume PROPERTIES LABELS processes TIMEOUT 300 RUN_SERIAL ON)
endif()
