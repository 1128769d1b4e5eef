//! Whom secure connections trust: the roots that browsers trust, compiled in, and those that `SSL_CERT_FILE` and
//! `SSL_CERT_DIR` name.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

/// All roots, and a sentence for each of the named ones that could not be had.
pub fn roots() -> (RootCertStore, Vec<String>) {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let mut complaints = Vec::new();
    let named = |variable| env::var_os(variable).filter(|value: &std::ffi::OsString| !value.is_empty());
    if let Some(file) = named("SSL_CERT_FILE").map(PathBuf::from) {
        match certificates(&file) {
            Ok(found) if found.is_empty() => {
                complaints.push(format!("SSL_CERT_FILE names {}, which holds no certificate", file.display()));
            }
            Ok(found) => drop(roots.add_parsable_certificates(found)),
            Err(why) => complaints.push(format!("SSL_CERT_FILE names {}: {why}", file.display())),
        }
    }
    for folder in named("SSL_CERT_DIR").iter().flat_map(env::split_paths) {
        match fs::read_dir(&folder) {
            // Such folders hold other files too.
            Ok(files) => {
                let found = files.flatten().filter_map(|file| certificates(&file.path()).ok()).flatten();
                roots.add_parsable_certificates(found);
            }
            Err(error) => complaints.push(format!("SSL_CERT_DIR names {}: {error}", folder.display())),
        }
    }
    (roots, complaints)
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = fs::read(file).map_err(|error| error.to_string())?;
    CertificateDer::pem_slice_iter(&bytes).collect::<Result<_, _>>().map_err(|error| error.to_string())
}
