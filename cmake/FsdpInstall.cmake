# Headers, libraries, and the package that find_package(fsdp) reads.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set_target_properties(fsdp_plan PROPERTIES EXPORT_NAME plan)
install(TARGETS fsdp fsdp_plan EXPORT fsdpTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/fsdp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${_package})
configure_package_config_file(cmake/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
                              INSTALL_DESTINATION ${_package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdpConfig.cmake ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
              cmake/FindLibTorch.cmake DESTINATION ${_package})
