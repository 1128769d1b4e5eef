//! The root certificates that TLS trusts: those of browsers, compiled in, and those that `SSL_CERT_FILE` and
//! `SSL_CERT_DIR` name.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

/// A file with certificates may be so long; the bundles of systems have 0.2 MiB. A longer one is not used.
const FILE_MAX: u64 = 16 << 20;
/// The files of one directory that are read; further ones are ignored.
const FILES_MAX: usize = 10_000;

/// All root certificates, and an error text for each named one that cannot be used.
pub(super) fn roots() -> (RootCertStore, Vec<String>) {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let mut problems = Vec::new();
    let named = |variable| env::var_os(variable).filter(|value: &std::ffi::OsString| !value.is_empty());
    if let Some(file) = named("SSL_CERT_FILE").map(PathBuf::from) {
        match certificates(&file) {
            Ok(found) if found.is_empty() => {
                problems.push(format!("SSL_CERT_FILE names {}, which holds no certificate", file.display()));
            }
            Ok(found) => drop(roots.add_parsable_certificates(found)),
            Err(why) => problems.push(format!("SSL_CERT_FILE names {}: {why}", file.display())),
        }
    }
    for folder in named("SSL_CERT_DIR").iter().flat_map(env::split_paths) {
        match fs::read_dir(&folder) {
            // Such directories contain other files too.
            Ok(files) => {
                let found =
                    files.flatten().take(FILES_MAX).filter_map(|file| certificates(&file.path()).ok()).flatten();
                roots.add_parsable_certificates(found);
            }
            Err(error) => problems.push(format!("SSL_CERT_DIR names {}: {error}", folder.display())),
        }
    }
    (roots, problems)
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = outlast_os::read_named(file, FILE_MAX).map_err(|error| error.to_string())?;
    CertificateDer::pem_slice_iter(&bytes).collect::<Result<_, _>>().map_err(|error| error.to_string())
}
