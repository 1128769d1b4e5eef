//! Files and directories that outlast keeps its own records in. They are opened without following a symbolic link and
//! without waiting for another process, and only if they belong to this user.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, ErrorKind, Read},
    path::Path,
};

/// Opens a regular file. A symbolic link, a FIFO, a device and a directory are errors, each with its own text. A new
/// file is readable by its owner only.
pub fn open_regular(options: &OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    let options = {
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = options.clone();
        // Opening a FIFO without a reader or writer fails at once instead of waiting.
        options.mode(0o600).custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK);
        options
    };
    #[cfg(windows)]
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
        return Err(unusable("it is a symbolic link"));
    }
    let file = options.open(path).map_err(|error| match what_is_not_a_file(&fs::symlink_metadata(path)) {
        Some(what) => unusable(what),
        None => error,
    })?;
    match what_is_not_a_file(&file.metadata()) {
        Some(what) => Err(unusable(what)),
        None => Ok(file),
    }
}

/// Like [`open_regular`], for a file that belongs to this user and that no other user can write to.
pub fn open_own(options: &OpenOptions, path: &Path) -> io::Result<File> {
    let file = open_regular(options, path)?;
    is_own(&file.metadata()?)?;
    Ok(file)
}

/// Reads a file of this user. A file longer than `max` bytes is an error.
pub fn read_own(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read_up_to(open_own(OpenOptions::new().read(true), path)?, max)
}

/// Reads a regular file of any user. A file longer than `max` bytes is an error.
pub fn read_regular(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read_up_to(open_regular(OpenOptions::new().read(true), path)?, max)
}

/// Reads a regular file that a setting names. A symbolic link is followed: deployments replace keys and certificates
/// through links. A FIFO, a device and a file longer than `max` bytes are errors at once.
pub fn read_named(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read_up_to(open_named(path)?, max)
}

/// Opens such a file. Use this where another program decides what is at the path: opening a FIFO would wait for a writer.
pub fn open_named(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, nix::libc::O_NONBLOCK);
    let file = options.open(path)?;
    match what_is_not_a_file(&file.metadata()) {
        Some(what) => Err(unusable(what)),
        None => Ok(file),
    }
}

/// A lock on a file of this user, until it is dropped or the process ends.
#[derive(Debug)]
pub struct FileLock {
    #[cfg(unix)]
    _file: nix::fcntl::Flock<File>,
    #[cfg(windows)]
    _file: File,
}

/// Locks a file of this user; creates it if it does not exist. `None` if another process holds the lock.
pub fn lock_own(path: &Path) -> io::Result<Option<FileLock>> {
    let mut options = OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    {
        use nix::{errno::Errno, fcntl::Flock, fcntl::FlockArg};
        // In a directory that has become read-only, an existing file can still be locked.
        let file = open_own(&options, path).or_else(|error| match error.kind() {
            ErrorKind::ReadOnlyFilesystem => open_own(OpenOptions::new().read(true), path),
            _ => Err(error),
        })?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => Ok(Some(FileLock { _file: locked })),
            Err((_, Errno::EAGAIN)) => Ok(None),
            Err((_, errno)) => Err(errno.into()),
        }
    }
    #[cfg(windows)]
    {
        use std::os::windows::fs::OpenOptionsExt;
        /// Another process has opened the file without sharing it.
        const ERROR_SHARING_VIOLATION: i32 = 32;
        match open_own(options.share_mode(0), path) {
            Ok(file) => Ok(Some(FileLock { _file: file })),
            Err(error) if error.raw_os_error() == Some(ERROR_SHARING_VIOLATION) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn read_up_to(file: File, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max {
        true => Err(io::Error::new(ErrorKind::FileTooLarge, format!("it is longer than {max} bytes"))),
        false => Ok(bytes),
    }
}

/// An error if a directory is a symbolic link, belongs to another user, or is writable by another user.
pub fn check_own_dir(dir: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(dir)?;
    if found.is_symlink() {
        return Err(unusable("it is a symbolic link"));
    }
    if !found.is_dir() {
        return Err(io::Error::new(ErrorKind::NotADirectory, "it is not a directory"));
    }
    is_own(&found)
}

/// Like [`check_own_dir`], for a directory that outlast writes to: write permission of other users is removed first.
pub fn close_own_dir(dir: &Path) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let found = fs::symlink_metadata(dir)?;
        let is_ours = found.is_dir() && found.uid() == nix::unistd::geteuid().as_raw();
        if is_ours && found.mode() & 0o022 != 0 {
            // If the file system has no such permissions, the check below fails.
            let _ = fs::set_permissions(dir, fs::Permissions::from_mode(0o700));
        }
    }
    check_own_dir(dir)
}

#[cfg(unix)]
fn is_own(found: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    if found.uid() != nix::unistd::geteuid().as_raw() {
        return Err(unusable("it belongs to another user"));
    }
    match found.mode() & 0o022 {
        0 => Ok(()),
        _ => Err(unusable("other users can write to it")),
    }
}

/// The standard library does not report the owner on Windows. The directories are below the user's profile or the
/// project.
#[cfg(windows)]
fn is_own(_found: &Metadata) -> io::Result<()> {
    Ok(())
}

fn what_is_not_a_file(found: &io::Result<Metadata>) -> Option<&'static str> {
    let found = found.as_ref().ok().filter(|found| !found.is_file())?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if found.file_type().is_fifo() {
            return Some("it is a FIFO, not a file");
        }
        if found.file_type().is_socket() {
            return Some("it is a socket, not a file");
        }
    }
    Some(match (found.is_symlink(), found.is_dir()) {
        (true, _) => "it is a symbolic link",
        (_, true) => "it is a directory, not a file",
        _ => "it is a device, not a file",
    })
}

fn unusable(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, what)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn only_a_file_of_ours_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("plain"), "text").unwrap();
        fs::write(path("open"), "text").unwrap();
        fs::set_permissions(path("open"), fs::Permissions::from_mode(0o620)).unwrap();
        symlink(path("plain"), path("link")).unwrap();
        symlink(path("nothing"), path("dangling")).unwrap();
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::create_dir(path("dir")).unwrap();
        let table = [
            ("plain", None),
            ("open", Some("other users can write to it")),
            ("link", Some("it is a symbolic link")),
            ("dangling", Some("it is a symbolic link")),
            ("fifo", Some("it is a FIFO, not a file")),
            ("dir", Some("it is a directory, not a file")),
            ("/dev/null", Some("it is a device, not a file")),
        ];
        let mut append = OpenOptions::new();
        append.append(true).create(true);
        for (name, wrong) in table {
            let wrong = wrong.map(str::to_owned);
            let path = dir.path().join(name);
            assert_eq!(read_own(&path, 10).err().map(|error| error.to_string()), wrong, "{name}");
            assert_eq!(open_own(&append, &path).err().map(|error| error.to_string()), wrong, "{name}");
        }
        assert!(!path("nothing").exists(), "nothing is created behind a link");
        assert_eq!(read_own(&path("plain"), 3).unwrap_err().to_string(), "it is longer than 3 bytes");
        assert_eq!(read_regular(&path("open"), 10).unwrap(), b"text");
    }

    #[test]
    fn only_a_directory_of_ours_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for (name, mode) in [("own", 0o700), ("seen", 0o755), ("open", 0o777)] {
            fs::create_dir(path(name)).unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        symlink(path("own"), path("link")).unwrap();
        fs::write(path("file"), "").unwrap();
        let table = [
            ("own", None),
            ("seen", None),
            ("open", Some("other users can write to it")),
            ("link", Some("it is a symbolic link")),
            ("file", Some("it is not a directory")),
        ];
        for (name, wrong) in table {
            let found = check_own_dir(&path(name)).err().map(|error| error.to_string());
            assert_eq!(found, wrong.map(str::to_owned), "{name}");
        }
        close_own_dir(&path("open")).unwrap();
        assert_eq!(fs::metadata(path("open")).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(close_own_dir(&path("link")).is_err());
    }
}
