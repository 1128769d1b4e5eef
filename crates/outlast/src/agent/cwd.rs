//! The working directory of an agent. It is resolved at each start, because a document may have moved.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use outlast_os as os;
use serde::{Deserialize, Serialize};

/// Files that mark the root of a project. `.outlast/` does not: outlast creates it wherever an agent works.
const ROOT_SIGNS: [&str; 2] = ["outlast.toml", ".agent-doc"];
/// Marks a root, too, except in the home directory itself, where it usually is a repository of dotfiles.
const REPOSITORY: &str = ".git";

/// Which setting decided the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    CliFlag,
    Frontmatter,
    ProjectRoot,
    DocumentParent,
    CurrentDir,
}

impl Source {
    /// For logs and programs; it never changes.
    pub(crate) fn tag(self) -> &'static str {
        match self {
            Source::CliFlag => "cli_flag",
            Source::Frontmatter => "frontmatter",
            Source::ProjectRoot => "project_root",
            Source::DocumentParent => "document_parent",
            Source::CurrentDir => "current_dir",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::CliFlag => "`--cwd`",
            Source::Frontmatter => "the front matter of the document",
            Source::ProjectRoot => "the project root",
            Source::DocumentParent => "the directory of the document",
            Source::CurrentDir => "the current directory",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cwd {
    pub path: PathBuf,
    pub source: Source,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CwdError {
    #[error("{from} names the working directory `{path}`, which does not exist")]
    Missing { path: String, from: Source },
    #[error("{from} names the working directory `{path}`, which is not a directory")]
    NotADirectory { path: String, from: Source },
    #[error("{from} names the working directory `{path}`, which cannot be used")]
    Os { path: String, from: Source, source: io::Error },
    #[error("cannot find the document {path}")]
    Document { path: String, source: io::Error },
}

impl CwdError {
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            CwdError::Missing { from: Source::CliFlag, .. } => {
                Some("a relative path counts from the current directory".to_owned())
            }
            CwdError::Missing { from: Source::Frontmatter, .. } => {
                Some("a relative path counts from the directory of the document".to_owned())
            }
            CwdError::Document { .. } => {
                Some("the document is the argument before `--`; the agent's command follows `--`".to_owned())
            }
            _ => None,
        }
    }
}

/// The inputs of the resolution.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CwdInputs<'a> {
    pub flag: Option<&'a Path>,
    pub frontmatter: Option<&'a str>,
    pub document: Option<&'a Path>,
    /// The directory in which outlast was started.
    pub here: &'a Path,
    /// The user's home directory.
    pub home: Option<&'a Path>,
}

/// The flag, else the frontmatter of the document, else the document's project, else the document's directory.
/// Without a document it is the current directory, as if the agent had been started by hand. A given path that is
/// invalid is an error: a fallback would start the agent in the wrong directory.
pub(crate) fn resolve(inputs: CwdInputs<'_>) -> Result<Cwd, CwdError> {
    let here = inputs.here;
    let parent = match inputs.document {
        None => None,
        Some(document) => {
            let unfound = |source| CwdError::Document { path: document.display().to_string(), source };
            let document = os::real_path(&here.join(document)).map_err(unfound)?;
            Some(document.parent().unwrap_or(Path::new("/")).to_owned())
        }
    };
    if let Some(flag) = inputs.flag {
        return check(&here.join(flag), flag, Source::CliFlag);
    }
    if let Some(said) = inputs.frontmatter {
        let base = parent.as_deref().unwrap_or(here);
        return check(&base.join(said), Path::new(said), Source::Frontmatter);
    }
    let Some(parent) = parent else { return check(here, here, Source::CurrentDir) };
    let home = inputs.home.and_then(|home| os::real_path(home).ok());
    match parent.ancestors().find(|dir| is_root(dir, home.as_deref())) {
        Some(root) => check(root, root, Source::ProjectRoot),
        None => check(&parent, &parent, Source::DocumentParent),
    }
}

fn is_root(dir: &Path, home: Option<&Path>) -> bool {
    ROOT_SIGNS.iter().any(|sign| dir.join(sign).exists()) || (Some(dir) != home && dir.join(REPOSITORY).exists())
}

fn check(path: &Path, said: &Path, from: Source) -> Result<Cwd, CwdError> {
    let said = said.display().to_string();
    let found = os::real_path(path).and_then(|path| Ok((fs::metadata(&path)?, path)));
    match found {
        Ok((metadata, path)) if metadata.is_dir() => Ok(Cwd { path, source: from }),
        Ok(_) => Err(CwdError::NotADirectory { path: said, from }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(CwdError::Missing { path: said, from }),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Err(CwdError::NotADirectory { path: said, from }),
        Err(source) => Err(CwdError::Os { path: said, from, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `root/.git`, `root/docs/plan.md`, `root/docs/deep/down`, `loose/plan.md` outside of any project, and a home
    /// directory that is a repository, with a project in it.
    struct World {
        _dir: tempfile::TempDir,
        base: PathBuf,
    }

    impl World {
        fn new() -> World {
            let dir = tempfile::tempdir().unwrap();
            let base = os::real_path(dir.path()).unwrap();
            for dir in [
                "root/.git",
                "root/docs/deep/down/.outlast",
                "loose/.outlast",
                "home/.git",
                "home/notes",
                "home/app/.git",
            ] {
                fs::create_dir_all(base.join(dir)).unwrap();
            }
            let files = ["root/docs/plan.md", "root/docs/deep/down/plan.md", "loose/plan.md", "home/notes/plan.md"];
            for file in files.into_iter().chain(["home/app/plan.md"]) {
                fs::write(base.join(file), "").unwrap();
            }
            World { _dir: dir, base }
        }

        fn resolve(
            &self,
            flag: &str,
            said: &str,
            document: &str,
            here: &str,
        ) -> Result<(String, &'static str), CwdError> {
            fn some(text: &str) -> Option<&str> {
                Some(text).filter(|text| !text.is_empty())
            }
            let here = self.base.join(here);
            let inputs = CwdInputs {
                flag: some(flag).map(Path::new),
                frontmatter: some(said),
                document: some(document).map(Path::new),
                here: &here,
                home: Some(&self.base.join("home")),
            };
            resolve(inputs).map(|cwd| {
                let path = cwd.path.strip_prefix(&self.base).unwrap().display().to_string().replace('\\', "/");
                (path, cwd.source.tag())
            })
        }
    }

    #[test]
    fn the_directory_is_found_in_this_order() {
        let world = World::new();
        #[rustfmt::skip]
        let table = [
            // --cwd   frontmatter  document                  started in   directory    source
            ("docs",   "..",        "docs/plan.md",           "root",      "root/docs", "cli_flag"),
            ("..",     "",          "plan.md",                "root/docs", "root",      "cli_flag"),
            ("",       "deep",      "root/docs/plan.md",      "",          "root/docs/deep", "frontmatter"),
            ("",       "..",        "docs/plan.md",           "root",      "root",      "frontmatter"),
            ("",       "",          "docs/plan.md",           "root",      "root",      "project_root"),
            ("",       "",          "deep/down/plan.md",      "root/docs", "root",      "project_root"),
            ("",       "",          "",                       "root/docs", "root/docs", "current_dir"),
            ("",       "",          "",                       "root",      "root",      "current_dir"),
            ("..",     "",          "",                       "root/docs", "root",      "cli_flag"),
            ("",       "",          "notes/plan.md",          "home",      "home/notes", "document_parent"),
            ("",       "",          "app/plan.md",            "home",      "home/app",  "project_root"),
            ("",       "",          "../loose/plan.md",       "root",      "loose",     "document_parent"),
            ("",       "",          "",                       "loose",     "loose",     "current_dir"),
        ];
        for (flag, said, document, here, path, source) in table {
            let found = world.resolve(flag, said, document, here).unwrap();
            assert_eq!(found, (path.to_owned(), source), "{flag} {said} {document} {here}");
        }
    }

    #[test]
    fn the_tags_are_stable() {
        use Source::*;
        let tags = [CliFlag, Frontmatter, ProjectRoot, DocumentParent, CurrentDir].map(Source::tag);
        assert_eq!(tags, ["cli_flag", "frontmatter", "project_root", "document_parent", "current_dir"]);
    }

    // The messages include error texts of the system.
    #[cfg(unix)]
    #[test]
    fn an_invalid_directory_is_an_error_with_its_source() {
        let world = World::new();
        let mut words = String::new();
        for (flag, said, document) in [
            ("nowhere", "..", "docs/plan.md"),
            ("docs/plan.md", "", ""),
            ("docs/plan.md/x", "", ""),
            ("", "nowhere", "docs/plan.md"),
            ("", "plan.md", "docs/plan.md"),
            ("docs", "", "docs/none.md"),
        ] {
            let error = world.resolve(flag, said, document, "root").unwrap_err();
            words.push_str(&crate::cli::report::Report::of(&error, error.hint(), 2).to_string());
        }
        insta::assert_snapshot!(words, @"
        error: `--cwd` names the working directory `nowhere`, which does not exist
          hint: a relative path counts from the current directory
        error: `--cwd` names the working directory `docs/plan.md`, which is not a directory
        error: `--cwd` names the working directory `docs/plan.md/x`, which is not a directory
        error: the front matter of the document names the working directory `nowhere`, which does not exist
          hint: a relative path counts from the directory of the document
        error: the front matter of the document names the working directory `plan.md`, which is not a directory
        error: cannot find the document docs/none.md
          because: no such file or directory
          hint: the document is the argument before `--`; the agent's command follows `--`
        ");
    }
}
